"""What people at a hospital see of the plans that a coordinator sent, decide about them, and look up later."""
