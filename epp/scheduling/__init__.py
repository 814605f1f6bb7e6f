"""WHICH endpoint: facts, filters, scorers and pickers combined into one placement that explains itself."""
