"""What is known of one request of an engine between its first query and its end."""
