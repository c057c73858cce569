"""FedIRM: classes that a site does not label are to resemble one another as they do where they are labelled."""
