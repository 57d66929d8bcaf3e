"""Versioned weights: publish and pull."""
