"""A PACS over DICOMweb: what it is asked, what it may answer, and what of that is kept on this machine."""
