"""From scored samples to the batches that the learner trains on."""
