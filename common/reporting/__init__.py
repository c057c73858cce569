"""Parts of HTML pages and of tables for people, which all our programs share."""
