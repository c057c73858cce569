"""The backbone architectures: our own networks, networks of other libraries, and the ``[model]`` table."""
