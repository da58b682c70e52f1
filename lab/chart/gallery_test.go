package chart

import (
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// gallery is where TestGallery leaves its drawings: go test ./lab/chart -run Gallery -gallery DIR
var gallery = flag.String("gallery", "", "write the made-up charts to this folder")

const madeUp = "made-up numbers · Linux 6.18.44 · AMD EPYC, 2 processors · commit f06a0ae · seed 1 · resolution ±0.6 %"

// lognormal is n sorted made-up times around mid µs.
func lognormal(n int, mid, sd float64, seed uint64) []float64 {
	r := rand.New(rand.NewPCG(seed, 1))
	v := make([]float64, n)
	for i := range v {
		v[i] = mid * math.Exp(sd*math.Abs(r.NormFloat64()))
		if r.IntN(200) == 0 {
			v[i] *= 1 + 5*r.Float64()
		}
	}
	slices.Sort(v)
	return v
}

func cumulative(v []float64) (p []Point) {
	for i, x := range v {
		p = append(p, Point{X: x, Y: float64(i+1) / float64(len(v))})
	}
	return p
}

func percentiles(v []float64) (p []Point) {
	for i, x := range v {
		p = append(p, Point{X: float64(i) / float64(len(v)), Y: x})
	}
	return p
}

func bins(v []float64) (b []Bin) {
	for _, x := range v {
		b = append(b, Bin{From: x, To: x * 1.001, Count: 1})
	}
	return b
}

// drawing is a chart in a frame.
type drawing struct {
	chart Chart
	frame Frame
}

func (d drawing) plot() *plot { return d.chart.plot(d.frame) }

// drawings are made-up charts of every kind, the awkward cases among them, for wide and for narrow screens.
func drawings() map[string]drawing {
	all := map[string]drawing{}
	for name, c := range charts() {
		all[name], all[name+"-narrow"] = drawing{c, c.frame()}, drawing{c, c.frame().narrowed()}
	}
	return all
}

func charts() map[string]Chart {
	ns := []float64{1, 10, 100, 1000, 10000}
	ratios := func(name string, s Style, base, slope, width float64) Series {
		out := Series{Name: name, Style: s}
		for i, n := range ns {
			y := base + slope*float64(i)
			out.Points = append(out.Points, Point{n, y, y - width, y + width*1.3})
		}
		return out
	}
	growth := func(name string, s Style, at1, power float64) Series {
		out := Series{Name: name, Style: s}
		for _, n := range ns {
			y := at1 * (1 + math.Pow(n, power))
			out.Points = append(out.Points, Point{n, y, y * 0.9, y * 1.15})
		}
		return out
	}
	x := Axis{Title: "Services × 10 endpoints", Log: true}
	direct, nft := lognormal(4000, 60, 0.06, 1), lognormal(4000, 66, 0.08, 2)
	return map[string]Chart{
		"line-ratio": Line{
			Frame: Frame{ID: "r", Title: "New connection through nftables: 1.06 to 1.08 × direct from 1 to 10,000 Services",
				Footer: madeUp,
				Sub:    "median of the ratios to direct in the same round, with 95 % interval; 21 rounds"},
			X: x, Y: Axis{Title: "ratio to direct", Suffix: " ×"},
			Series: []Series{ratios("nftables", 1, 1.06, 0.004, 0.006), ratios("iptables", 2, 1.07, 0.05, 0.012),
				ratios("ebpf", 3, 1.003, 0.001, 0.004)},
			References: []Reference{{Name: "direct", Value: 1, Low: 0.994, High: 1.006},
				{Name: "±2 % margin", Value: 1.02, Low: 1.02, High: 1.02, Dashed: true}},
		},
		"line-absolute": Line{
			Frame: Frame{ID: "a", Title: "New connection: 61.0 µs direct, 65.1 to 66.0 µs through nftables", Footer: madeUp,
				Sub: "median of 21 blocks, 95 % interval"},
			X: x, Y: Axis{Title: "µs per connection", Zero: true},
			Series:     []Series{ratios("nftables", 1, 65.1, 0.3, 0.5), ratios("nftables, first Service", 4, 65, 0.31, 0.5)},
			References: []Reference{{Name: "direct", Value: 61, Low: 60.6, High: 61.4}},
		},
		"line-loglog": Line{
			Frame: Frame{ID: "l", Title: "Cold sync grows in proportion beyond 100 Services", Footer: madeUp,
				Sub: "median of 7 blocks, 95 % interval"},
			X: x, Y: Axis{Title: "ms until all is in the kernel", Log: true},
			Series: []Series{growth("nftables", 1, 2, 0.6), growth("iptables", 2, 9, 0.9), growth("ipvs", 5, 2.2, 0.59),
				growth("ebpf", 6, 1, 0.5)},
			Ghosts: []Ghost{{1000, 820, "kube-proxy nft"}, {9000, 14000, "other nft"}, {10000, 14300, "kube-proxy nft"},
				{10000, 40000, "KEP layout"}},
		},
		"line-bare": Line{Frame: Frame{ID: "b", Title: "One point", Footer: "f"}, X: Axis{Title: "n"}, Y: Axis{Title: "µs"},
			Series: []Series{{Name: "alone", Style: 9, Points: []Point{{X: 3, Y: 5}}}}},
		"line-empty": Line{Frame: Frame{ID: "e", Title: "Nothing was measured", Footer: "f"}, X: Axis{Title: "n", Log: true},
			Y: Axis{Title: "µs", Log: true}},
		"ecdf": ECDF{
			Frame: Frame{ID: "c", Title: "One endpoint change: half within 0.11 ms, 99 % within 0.20 ms, at 10,000 Services",
				Footer: madeUp, Sub: "4,000 changes each; marks at the quarters"},
			X: Axis{Title: "µs from file to kernel", Log: true}, Curves: []Series{{"10 Services", 1, cumulative(direct)},
				{"1,000 Services", 2, cumulative(nft)}, {"10,000 Services", 3, cumulative(lognormal(4000, 80, 0.2, 4))}},
		},
		"percentiles": Percentiles{
			Frame: Frame{ID: "p", Title: "New connection at 10,000 Services: p99 is 79 µs direct, 86 µs through nftables",
				Footer: madeUp, Sub: "84,000 connections each; marks at 50, 90, 99, 99.9 %"},
			Y:      Axis{Title: "µs per connection", Log: true},
			Curves: []Series{{"direct", 0, percentiles(direct)}, {"nftables", 1, percentiles(nft)}},
		},
		"histogram": Histogram{
			Frame: Frame{ID: "h", Title: "New connection: where the times lie", Footer: madeUp, Sub: "4,000 connections each"},
			X:     Axis{Title: "µs per connection", Log: true},
			Sets:  []Counts{{"direct", 0, bins(direct), true}, {"nftables", 1, bins(nft), false}},
		},
		"bars": Bars{
			Frame: Frame{ID: "m", Title: "Resident memory: 31 MiB with one Service, 118 MiB with 10,000", Footer: madeUp,
				Sub: "highest of 3 readings"},
			X: Axis{Title: "MiB"}, Bound: 150, Limits: "aim: ≤ 150 MiB",
			Bars: []Bar{{"nftables, 1", 1, []float64{31}, 30, 32, ""}, {"nftables, 1,000", 1, []float64{44}, 43, 46, ""},
				{"nftables, 10,000", 1, []float64{118}, 112, 121, ""}},
		},
		"bars-stacked": Bars{
			Frame: Frame{ID: "s", Title: "Processor time per connection", Footer: madeUp, Sub: "mean of 21 blocks"},
			X:     Axis{Title: "µs of processor time per connection"}, Stack: []string{"client", "server", "softirq"},
			Bars: []Bar{{Name: "direct", Parts: []float64{20, 18, 9}}, {Name: "nftables", Parts: []float64{21, 18, 14}}},
		},
		"forest": Forest{
			Frame: Frame{ID: "f", Title: "Aims: 3 hit, 2 miss, 1 unclear, 1 not measured", Footer: madeUp,
				Sub: "each number over its bound, with 95 % interval"},
			Claims: []Claim{
				{ID: "G5", Text: "cold sync of 10,000 Services × 10 endpoints in ≤ 0.4 s", Value: 2.1, Low: 1.9, High: 2.4,
					Says: "0.84 s of ≤ 0.4 s", Outcome: Broken},
				{ID: "G6a", Text: "one endpoint change at 10,000 Services: p99 in the kernel ≤ 0.3 ms", Value: 0.66, Low: 0.6,
					High: 0.71, Says: "0.20 ms of ≤ 0.3 ms", Outcome: Met},
				{ID: "G6b", Text: "one endpoint change costs at most 1.1 times as much with 10,000 Services as with 10",
					Value: 0.97, Low: 0.93, High: 1.04, Says: "1.07 × of ≤ 1.1 ×", Outcome: Open},
				{ID: "G10", Text: "resident memory ≤ 150 MiB at 10,000 Services", Value: 0.78, Low: 0.75, High: 0.81,
					Says: "118 MiB of ≤ 150 MiB", Outcome: Met},
				{ID: "G11", Text: "idle ≤ 0.02 % of a core", Value: 0.0001, Low: 0.00005, High: 0.0002,
					Says: "0.000002 % of ≤ 0.02 %", Outcome: Met},
				{ID: "S", Text: "cold sync at least 100 times faster than kube-proxy", Value: 0.4, Low: 0.3, High: 0.6, Least: true,
					Says: "40 × of ≥ 100 ×", Outcome: Broken},
				{ID: "G17", Text: "no connection lost in 10,000 endpoint replacements", Outcome: Missing},
			},
		},
	}
}

func TestGallery(t *testing.T) {
	for name, d := range drawings() {
		p := d.plot()
		if *gallery != "" {
			if err := os.WriteFile(filepath.Join(*gallery, name+".svg"), p.done(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
