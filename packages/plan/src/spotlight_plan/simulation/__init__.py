"""The controller in virtual time: a cost model, spot traces and injected faults instead of GPUs."""
