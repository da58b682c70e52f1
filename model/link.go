package model

// Link is a network device of the node that carries IP.
type Link struct {
	Index    int
	Name     string
	Loopback bool
}

func (*Link) servicePart() {}
