"""Names and durability: every path made and parsed, publishing, safe opening, locks. Imports nothing by itself."""
