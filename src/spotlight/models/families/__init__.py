"""One module per model family; :data:`spotlight.registry.FAMILIES` names their classes."""
