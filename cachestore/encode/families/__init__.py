"""The rows: what each family of models makes and needs."""
