"""The only room with sockets, files and clocks."""
