"""Trackers that are packages of their own, and what all trackers are shown besides numbers."""
