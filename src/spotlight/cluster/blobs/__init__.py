"""The blob store: in-flight progress and samples that outlive the workers that made them."""
