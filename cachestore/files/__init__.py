"""Files of a store: names, durable publishing, safe opening, locks."""
