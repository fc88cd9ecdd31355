"""The glue to Ray: actors by name, calls with deadlines, Ray's errors as kvray's."""
