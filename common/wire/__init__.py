"""The wire between coordinator and hospital: records, their bytes, their bounds."""
