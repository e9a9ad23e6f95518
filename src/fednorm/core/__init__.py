"""What a federated round is: roles, moments, messages, and the two functions every engine calls."""
