"""The denoising engine of one GPU: rollouts as values that advance step by step."""
