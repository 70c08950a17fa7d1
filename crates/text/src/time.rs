//! `strftime` for templates: the fields of a date in English, no time zones.

use std::fmt::Write;

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats seconds since 1970; `None` for a conversion it does not know.
pub(crate) fn strftime(seconds: i64, format: &str) -> Option<String> {
    let days = seconds.div_euclid(86_400);
    let second = seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (weekday, name) = (WEEKDAYS[(days + 4).rem_euclid(7) as usize], MONTHS[month as usize - 1]);
    let day_of_year = days - days_before(year) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next()?;
        let bare = code == '-';
        if bare {
            code = chars.next()?;
        }
        let (value, width) = match code {
            'Y' => (year, 4),
            'y' => (year.rem_euclid(100), 2),
            'm' => (month, 2),
            'd' => (day, 2),
            'j' => (day_of_year, 3),
            'H' => (hour, 2),
            'I' => (hour12, 2),
            'M' => (minute, 2),
            'S' => (second, 2),
            _ => {
                out.push_str(&match code {
                    'A' => weekday.to_owned(),
                    'a' => weekday[..3].to_owned(),
                    'B' => name.to_owned(),
                    'b' | 'h' => name[..3].to_owned(),
                    'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                    'F' => format!("{year:04}-{month:02}-{day:02}"),
                    'T' => format!("{hour:02}:{minute:02}:{second:02}"),
                    '%' => "%".to_owned(),
                    _ => return None,
                });
                continue;
            }
        };
        let width = if bare { 1 } else { width };
        write!(out, "{value:0width$}").ok()?;
    }
    Some(out)
}

/// Days from 1970 to the first of January of a year (Gregorian).
fn days_before(year: i64) -> i64 {
    let past = year - 1;
    past * 365 + past.div_euclid(4) - past.div_euclid(100) + past.div_euclid(400) - 719_162
}

/// Year, month and day of a number of days since 1970.
fn civil(days: i64) -> (i64, i64, i64) {
    // The average year undershoots or overshoots by at most one.
    let mut year = 1970 + (days as f64 / 365.2425).floor() as i64;
    while days < days_before(year) {
        year -= 1;
    }
    while days >= days_before(year + 1) {
        year += 1;
    }
    let leap = days_before(year + 1) - days_before(year) == 366;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let (mut month, mut day) = (1, days - days_before(year) + 1);
    for length in lengths {
        if day <= length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date =
            |seconds| strftime(seconds, "%A %d %B %Y %H:%M:%S %j %p %I %y %a %b").expect("known codes");
        // By Python's datetime.
        assert_eq!(date(0), "Thursday 01 January 1970 00:00:00 001 AM 12 70 Thu Jan");
        assert_eq!(date(951_827_696), "Tuesday 29 February 2000 12:34:56 060 PM 12 00 Tue Feb");
        assert_eq!(date(4_102_444_799), "Thursday 31 December 2099 23:59:59 365 PM 11 99 Thu Dec");
        assert_eq!(date(-1), "Wednesday 31 December 1969 23:59:59 365 PM 11 69 Wed Dec");
        assert_eq!(
            strftime(951_827_696, "%F %T 100%%, %-d").as_deref(),
            Some("2000-02-29 12:34:56 100%, 29")
        );
        assert_eq!(strftime(0, "%Q"), None);
        assert_eq!(strftime(0, "%"), None);
    }
}
