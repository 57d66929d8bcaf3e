"""Build a run's objects from its configuration: model, algorithm, rewards, engine and learner."""
