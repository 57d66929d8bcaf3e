"""The typed configuration of a run: schema, YAML files, overrides and errors with remedies."""
