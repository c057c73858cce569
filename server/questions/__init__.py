"""Questions to hospitals: requests that train nothing, each answered once."""
