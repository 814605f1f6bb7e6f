"""WHO can serve: endpoints, their scraped state in columns by slot, and what is in flight to them."""
