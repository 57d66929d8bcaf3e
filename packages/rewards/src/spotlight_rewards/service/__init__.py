"""Rewards as an HTTP service, for other machines and other trainers."""
