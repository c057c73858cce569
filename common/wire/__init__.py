"""The messages between coordinator and hospitals: typed records, their encoding, hashes and bounds of their fields."""
