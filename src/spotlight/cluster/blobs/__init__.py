"""Where in-flight progress and samples are stored, so that they outlive the workers that made them."""
