"""What `spotlight train --dry-run` prints: samples, passes, memory and disk, without loading a model."""
