"""The sections of a configuration, each with the checks of its keys."""
