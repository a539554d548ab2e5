"""How the computation runs fast: one folder a backend, loaded on first use."""
