"""Rewards that ask a server: a VLM at an OpenAI-compatible endpoint, or a reward service."""
