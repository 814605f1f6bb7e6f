"""The tables of plugin types, one module for each part of a request's way."""
