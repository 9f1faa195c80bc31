"""What each call passes between gRPC and the code that answers it: a table of methods, and middleware over it."""
