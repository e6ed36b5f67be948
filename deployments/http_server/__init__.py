"""The HTTP protocol of the servers in ingresses and in the hub: connections with bounds."""
