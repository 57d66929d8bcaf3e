"""Several processes of one node denoising the same rollouts together (Ulysses)."""
