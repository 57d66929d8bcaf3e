"""Commands about rewards and the prompts they score."""
