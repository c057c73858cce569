"""Keys and signatures of sites and coordinator, the audit log, and the check of who sent which reply."""
