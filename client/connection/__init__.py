"""The hospital's end of the link: TLS, the Fleet client, the service that takes messages, its status."""
