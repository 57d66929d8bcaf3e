"""From a configuration to the objects of a run: model, algorithm, rewards, engine and learner."""
