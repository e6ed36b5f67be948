"""Late binding: requests wait in the ingress, tenant by tenant, until an engine has room."""
