"""EndpointPickerConfig files: read, checked, explained, and built into plugins and I/O specs."""
