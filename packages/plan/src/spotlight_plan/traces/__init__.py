"""What is known of spot traces, and traces made up."""
