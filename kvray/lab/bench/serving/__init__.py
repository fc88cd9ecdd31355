"""The benches of serving: what a router's choice costs, and how endpoints answer under load."""
