"""Generated protobuf stubs (`make proto`); nothing in this package is written by hand but this line."""
