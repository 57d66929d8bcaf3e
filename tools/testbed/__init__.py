"""How the embedded testbed was made: architecture, prompts, scenes and training recipe."""
