"""Read images from a hospital's PACS over DICOMweb: search, download, and a cache on this machine."""
