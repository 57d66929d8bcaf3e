"""The plan that `spotlight train --dry-run` prints: samples, passes, memory and disk. Loads no model."""
