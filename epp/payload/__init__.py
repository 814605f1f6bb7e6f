"""WHAT was asked: bodies of requests and answers become records. The only room that decodes a body."""
