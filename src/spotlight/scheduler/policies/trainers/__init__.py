"""The GPUs of the learner make rollouts while they wait for samples."""
