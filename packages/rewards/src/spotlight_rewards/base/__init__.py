"""What all packages build on: errors, files, pictures, prompts, sections of a configuration."""
