"""Authentication, authorisation and audit of callers. Rules: SECURITY.md in this folder."""
