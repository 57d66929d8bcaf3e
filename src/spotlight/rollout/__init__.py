"""The denoising engine of one GPU: rollouts as immutable states that advance step by step."""
