"""The calls of our own programs on 127.0.0.1: sites registered, runs led; answered only to who knows the secret."""
